-- Makes committed tokens durable.
-- KEYS: record, log. ARGV: epoch, start, tokens (4 bytes each), digest after them, lease in ms, ttl in ms, then
-- pairs of a record field and its new value.
-- Returns {"ok", length}, {"missing"}, {"superseded", epoch, owner}, {"behind", epoch}, {"gap", length} or
-- {"conflict", length}.
local record = redis.call("HMGET", KEYS[1], "epoch", "length", "owner")
local held, length = tonumber(record[1]), tonumber(record[2])
if not held then
  return { "missing" }
end
local epoch, start, tokens = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
if epoch < held then
  return { "superseded", held, record[3] }
elseif epoch > held then
  return { "behind", held } -- Redis lost the acquisition: the caller has to acquire anew
elseif start > length then
  return { "gap", length }
end

local stop = start + #tokens / 4
if start < length then
  -- What is there already has to be the same. Entries may be cut differently from ours.
  local present = math.min(stop, length)
  local first = redis.call("XREVRANGE", KEYS[2], string.format("%.0f-0", start + 1), "-", "COUNT", 1)
  local from = first[1] and first[1][1] or "-"
  local position = start
  for _, entry in ipairs(redis.call("XRANGE", KEYS[2], from, string.format("%.0f-0", present))) do
    local at = tonumber(string.match(entry[1], "^(%d+)-0$"))
    if at and entry[2][1] == "t" then
      at = at - 1
      local bytes = entry[2][2]
      local upto = math.min(present, at + #bytes / 4)
      local ours = string.sub(tokens, (position - start) * 4 + 1, (upto - start) * 4)
      local theirs = string.sub(bytes, (position - at) * 4 + 1, (upto - at) * 4)
      if at > position or ours ~= theirs then
        return { "conflict", length }
      end
      position = upto
    end
  end
  if position < present then
    return { "conflict", length }
  end
end

local time = redis.call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local fields = { "lease", string.format("%.0f", now + ARGV[5]) }
for i = 7, #ARGV do
  fields[#fields + 1] = ARGV[i]
end
if stop > length then
  local fresh = string.sub(tokens, (length - start) * 4 + 1)
  redis.call("XADD", KEYS[2], string.format("%.0f-0", length + 1), "t", fresh)
  fields[#fields + 1] = "length"
  fields[#fields + 1] = string.format("%.0f", stop)
  fields[#fields + 1] = "digest"
  fields[#fields + 1] = ARGV[4]
  length = stop
end
redis.call("HSET", KEYS[1], unpack(fields))
redis.call("PEXPIRE", KEYS[1], ARGV[6])
redis.call("PEXPIRE", KEYS[2], ARGV[6])
return { "ok", length }
