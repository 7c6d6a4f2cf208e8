-- Lists a session in the index of leases. KEYS: index. ARGV: session, ms from now on. Replies its end.
local time = redis.call("TIME")
local ends = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2]
redis.call("ZADD", KEYS[1], string.format("%.0f", ends), ARGV[1])
return ends
