-- Ends a generation whose owner is gone and that can be resumed no more, under a higher epoch: whoever owned it and wakes
-- up is refused. ARGV: the reason, or "" to look only. Replies {"ok", 1}, or {"ok", 0} if there is none.
local state = load()
if not state or state.closed or not state.running or state.resumable > now() then
  return { "ok", 0 }
end
if ARGV[FIRST] ~= "" then
  log_finish(state.length, state.generation, ARGV[FIRST])
  set({ epoch = state.epoch + 1, owner = "", lease = "0", resumable = "0", finished = ARGV[FIRST] })
end
return { "ok", 1 }
