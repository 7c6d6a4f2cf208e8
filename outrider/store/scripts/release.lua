-- Gives the lease up. An unfinished generation can be resumed for resume_ttl from now.
-- ARGV: epoch, owner, durable length that the owner knows of, usage. Replies {"ok"}.
local state = load()
local refused = refusal(state, tonumber(ARGV[FIRST]), ARGV[FIRST + 1], tonumber(ARGV[FIRST + 2]))
if refused then
  return refused
end
if state.lease ~= 0 then
  local fields = { lease = "0", resumable = "0" }
  if state.running then
    fields.usage = ARGV[FIRST + 3]
    fields.resumable = text(now() + ARGV[2])
  end
  set(fields)
end
touch()
return { "ok" }
