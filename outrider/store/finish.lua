-- Ends a session's generation: a last entry in the log, between the tokens so far and any that follow.
-- KEYS: record, log. ARGV: epoch, reason, ttl in ms.
-- Returns {"ok", length}, {"missing"}, {"superseded", epoch, owner} or {"behind", epoch}.
local record = redis.call("HMGET", KEYS[1], "epoch", "length", "owner", "finished")
local held, length = tonumber(record[1]), record[2]
if not held then
  return { "missing" }
end
local epoch = tonumber(ARGV[1])
if epoch < held then
  return { "superseded", held, record[3] }
elseif epoch > held then
  return { "behind", held }
end
local id = length .. "-1"
if #redis.call("XRANGE", KEYS[2], id, id) == 0 then
  redis.call("XADD", KEYS[2], id, "finish", ARGV[2])
  redis.call("HSET", KEYS[1], "finished", ARGV[2], "lease", "0")
end
redis.call("PEXPIRE", KEYS[1], ARGV[3])
redis.call("PEXPIRE", KEYS[2], ARGV[3])
return { "ok", tonumber(length) }
