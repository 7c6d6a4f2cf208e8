-- Moves entries of the index of leases to another end, or removes them, if they are as they were seen.
-- KEYS: index. ARGV for each: session, the end that was seen, the new one ("0": none).
for i = 1, #ARGV, 3 do
  local held = redis.call("ZSCORE", KEYS[1], ARGV[i])
  if held and tonumber(held) == tonumber(ARGV[i + 1]) then
    if ARGV[i + 2] == "0" then
      redis.call("ZREM", KEYS[1], ARGV[i])
    else
      redis.call("ZADD", KEYS[1], ARGV[i + 2], ARGV[i])
    end
  end
end
