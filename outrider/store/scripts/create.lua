-- Makes a session without an owner. A session that is there stays as it is.
-- ARGV: record fields and their values. Replies {"ok", 1}, or {"ok", 0} if it was there.
if redis.call("EXISTS", RECORD) == 1 then
  return { "ok", 0 }
end
redis.call("HSET", RECORD, unpack(ARGV, FIRST))
touch()
return { "ok", 1 }
