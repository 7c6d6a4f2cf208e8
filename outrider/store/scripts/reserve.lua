-- Counts what a tenant's session takes. KEYS: when each session expires (sorted set), what each takes (hash), and when
-- each claim of an idempotency key expires (sorted set).
-- ARGV: session, generation, its bytes ("": forget the session), ms until the session and the claim
-- expire, the most sessions, the most bytes ("": settle: as many as there may be), the claim ("": none), bytes of a claim.
-- An entry of the hash is "S G R": S bytes of ended generations, and R bytes of generation G. Its field "" is the sum.
-- Replies {"ok", bytes}, or {"sessions", how many} or {"bytes", sum}: then nothing was counted. It may be repeated.
local ENDS, TAKEN, CLAIMS = KEYS[1], KEYS[2], KEYS[3]
local session, generation, most_sessions, most_bytes = ARGV[1], ARGV[2], tonumber(ARGV[5]), tonumber(ARGV[6])
local claim, claim_bytes = ARGV[7], tonumber(ARGV[8])
local time = redis.call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function taken(name)
  local settled, number, current = string.match(redis.call("HGET", TAKEN, name) or "0 -1 0", "(%d+) (%-?%d+) (%d+)")
  return tonumber(settled), number, tonumber(current)
end

local function add(bytes)
  local sum = redis.call("HINCRBY", TAKEN, "", string.format("%.0f", bytes + 0)) -- not "-0"
  return sum + claim_bytes * redis.call("ZCARD", CLAIMS)
end

local function forget(name)
  local settled, _, current = taken(name)
  redis.call("ZREM", ENDS, name)
  redis.call("HDEL", TAKEN, name)
  return add(-settled - current)
end

for _, name in ipairs(redis.call("ZRANGEBYSCORE", ENDS, "-inf", now, "LIMIT", 0, 1000)) do
  forget(name)
end
redis.call("ZREMRANGEBYSCORE", CLAIMS, "-inf", now)
if ARGV[3] == "" then
  return { "ok", forget(session) }
end
local settled, number, current = taken(session)
local bytes = tonumber(ARGV[3])
local late = tonumber(number) > tonumber(generation) -- a late repetition: a later generation is counted
local more = late and 0 or bytes
if number == generation then
  more = bytes - current
elseif not late then
  settled = settled + current
end
local asked = more
if claim ~= "" and not redis.call("ZSCORE", CLAIMS, claim) then
  asked = more + claim_bytes
end
if number == "-1" and most_sessions and redis.call("ZCARD", ENDS) >= most_sessions then
  return { "sessions", redis.call("ZCARD", ENDS) }
elseif most_bytes and asked > 0 and add(0) + asked > most_bytes then
  return { "bytes", add(0) }
end
if claim ~= "" then
  redis.call("ZADD", CLAIMS, "NX", string.format("%.0f", now + ARGV[4]), claim)
  redis.call("PEXPIRE", CLAIMS, ARGV[4])
end
if not late then
  redis.call("HSET", TAKEN, session, string.format("%.0f %s %.0f", settled, generation, bytes))
  redis.call("ZADD", ENDS, string.format("%.0f", now + ARGV[4]), session)
  redis.call("PEXPIRE", ENDS, ARGV[4])
  redis.call("PEXPIRE", TAKEN, ARGV[4])
end
return { "ok", add(more) }
