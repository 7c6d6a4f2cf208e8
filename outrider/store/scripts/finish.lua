-- Ends the running generation, if one runs: a last entry in the log, behind its tokens. Gives the lease up.
-- ARGV: epoch, owner, durable length that the owner knows of, reason, usage, and where the answer is to be dropped,
-- all tokens before it (4 bytes each) and the digest after them. Replies {"ok"}.
local state = load()
local refused = refusal(state, tonumber(ARGV[FIRST]), ARGV[FIRST + 1], tonumber(ARGV[FIRST + 2]))
if refused then
  return refused
end
local fields = { lease = "0", resumable = "0" }
if state.running then
  local kept = ARGV[FIRST + 5]
  if kept then
    redis.call("DEL", LOG) -- ids in a stream only grow, so the log is written anew
    log_tokens(0, kept, "")
    state.length = #kept / 4
    fields.length = text(state.length)
    fields.digest = ARGV[FIRST + 6]
  end
  log_finish(state.length, state.generation, ARGV[FIRST + 3])
  fields.finished = ARGV[FIRST + 3]
  fields.usage = ARGV[FIRST + 4]
end
set(fields)
touch()
return { "ok" }
