-- Makes a caller the owner of a session: compares the epoch and sets epoch + 1, owner and lease.
-- ARGV: expected epoch, owner. Replies {"ok", epoch, length}.
local expected, owner = tonumber(ARGV[FIRST]), ARGV[FIRST + 1]
local state = load()
if not state or state.closed then
  return { "missing" }
elseif state.epoch == expected + 1 and state.owner == owner then
  return { "ok", state.epoch, state.length } -- repeated: owners' names are used for one acquisition
elseif state.epoch ~= expected then
  return { "superseded", state.epoch, state.owner }
end
local fields = { epoch = expected + 1, owner = owner }
lend(fields, state.running)
set(fields)
touch()
return { "ok", expected + 1, state.length }
