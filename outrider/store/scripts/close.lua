-- Ends a session: its log goes; a tombstone with a higher epoch stays, which refuses its former owner.
-- ARGV: the tombstone's ttl in ms, digest of no tokens, the reason that ends a running generation. Replies {"ok"}.
local state = load()
if not state or state.closed then
  return { "ok" }
end
set({
  epoch = state.epoch + 1,
  owner = "",
  lease = "0",
  resumable = "0",
  length = "0",
  digest = ARGV[FIRST + 1],
  finished = state.running and ARGV[FIRST + 2] or state.finished,
  closed = "1",
})
redis.call("HDEL", RECORD, "turn", "plan", "usage", "verifier", "origin", "drafters")
redis.call("DEL", LOG)
redis.call("PEXPIRE", RECORD, ARGV[FIRST])
return { "ok" }
