-- Puts back what Redis lost, under a higher epoch, if the session still is as the owner has just seen it.
-- ARGV: what it saw (epoch, owner, length, digest, generation, finished; all "" if there was no session), how many
-- record fields follow, these and their values, then for each piece of the log: position, tokens, log-probabilities.
-- The fields hold the new epoch, owner, length, generation and finished. Replies {"ok"} or {"changed"}.
local state = load()
if state and state.closed then
  return { "closed" }
end
local fields, count = {}, tonumber(ARGV[FIRST + 6])
local pieces = FIRST + 7 + 2 * count
for i = FIRST + 7, pieces - 1, 2 do
  fields[ARGV[i]] = ARGV[i + 1]
end
if
  state
  and text(state.epoch) == fields.epoch
  and state.owner == fields.owner
  and text(state.length) == fields.length
  and text(state.generation) == fields.generation
  and state.finished == fields.finished
then
  return { "ok" } -- repeated
end
local held = redis.call("HMGET", RECORD, "epoch", "owner", "length", "digest", "generation", "finished")
for i = 1, 6 do
  if (held[i] or "") ~= ARGV[FIRST + i - 1] then
    return { "changed" }
  end
end

if not state then
  redis.call("DEL", LOG)
end
for i = pieces, #ARGV, 3 do
  log_tokens(tonumber(ARGV[i]), ARGV[i + 1], ARGV[i + 2])
end
local running = fields.finished == ""
if running then
  lend(fields, true)
else
  fields.lease, fields.resumable = "0", "0"
  local ended = state and state.finished ~= "" and text(state.generation) == fields.generation
  if not ended then
    log_finish(tonumber(fields.length), tonumber(fields.generation), fields.finished)
  end
end
set(fields)
touch()
return { "ok" }
