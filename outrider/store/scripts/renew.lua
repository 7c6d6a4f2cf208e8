-- Renews the owner's lease.
-- ARGV: epoch, owner, durable length that the owner knows of. Replies {"ok"}.
local state = load()
local refused = refusal(state, tonumber(ARGV[FIRST]), ARGV[FIRST + 1], tonumber(ARGV[FIRST + 2]))
if refused then
  return refused
end
local fields = {}
renew(fields, state)
if next(fields) then
  set(fields)
end
touch()
return { "ok" }
