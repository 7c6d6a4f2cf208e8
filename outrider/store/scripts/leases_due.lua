-- The entries of the index of leases whose end has come, the oldest first.
-- KEYS: index. ARGV: how many at most. Replies {session, end, session, end, ...}.
local time = redis.call("TIME")
local now = string.format("%.0f", time[1] * 1000 + math.floor(time[2] / 1000))
return redis.call("ZRANGEBYSCORE", KEYS[1], "-inf", now, "WITHSCORES", "LIMIT", 0, ARGV[1])
