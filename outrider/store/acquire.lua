-- Makes a caller the owner of a session: compares the epoch and sets epoch + 1, owner and lease.
-- KEYS: record, log. ARGV: expected epoch, owner, lease in ms, ttl in ms.
-- Returns {"ok", epoch}, {"missing"} or {"superseded", epoch, owner}.
local epoch = tonumber(redis.call("HGET", KEYS[1], "epoch"))
if not epoch then
  return { "missing" }
end
local expected, owner = tonumber(ARGV[1]), ARGV[2]
local holder = redis.call("HGET", KEYS[1], "owner")
-- The second case is a retry whose first reply was lost: owners' names are used for one acquisition only.
if epoch ~= expected and not (epoch == expected + 1 and holder == owner) then
  return { "superseded", epoch, holder }
end
local time = redis.call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call("HSET", KEYS[1], "epoch", expected + 1, "owner", owner, "lease", string.format("%.0f", now + ARGV[3]))
redis.call("PEXPIRE", KEYS[1], ARGV[4])
redis.call("PEXPIRE", KEYS[2], ARGV[4])
return { "ok", expected + 1 }
