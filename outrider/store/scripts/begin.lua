-- Begins a generation under a new owner: what `acquire` does, a turn, and the tokens of its prompt.
-- ARGV: expected epoch, owner, start, tokens (4 bytes each), digest after them, turn, plan, verifier ("": as it was),
-- the reason that ends a generation which cannot be resumed any more. Replies {"ok", epoch, length}.
local expected, owner, start, tokens = tonumber(ARGV[FIRST]), ARGV[FIRST + 1], tonumber(ARGV[FIRST + 2]), ARGV[FIRST + 3]
local digest, turn, plan, verifier = ARGV[FIRST + 4], ARGV[FIRST + 5], ARGV[FIRST + 6], ARGV[FIRST + 7]
local state = load()
if not state or state.closed then
  return { "missing" }
elseif state.epoch == expected + 1 and state.owner == owner then
  return { "ok", state.epoch, state.length } -- repeated
elseif state.epoch ~= expected then
  return { "superseded", state.epoch, state.owner }
elseif state.running and state.resumable > now() then
  return { "busy" }
elseif start > state.length then
  return { "gap", state.length }
elseif start < state.length then
  return { "conflict", state.length }
end
if state.running then
  log_finish(state.length, state.generation, ARGV[FIRST + 8])
end
local length = start + #tokens / 4
local fields = {
  epoch = expected + 1,
  owner = owner,
  generation = state.generation + 1,
  turn = turn,
  plan = plan,
  origin = "",
  drafters = "[]",
  usage = "",
  finished = "",
}
if verifier ~= "" then
  fields.verifier = verifier
end
if length > start then
  log_tokens(start, tokens, "")
  fields.length = text(length)
  fields.digest = digest
end
lend(fields, true)
set(fields)
touch()
return { "ok", expected + 1, length }
