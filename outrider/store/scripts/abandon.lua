-- Ends a generation whose owner is gone and that can be resumed no more, under a higher epoch: a former owner that wakes
-- up is refused. ARGV: the reason, or "" to look only. Replies {"ok", 1 or 0, end}: whether there is one, and when a
-- generation that has still not ended counts as left behind (ms; 0: there is none).
local state = load()
if not state or state.closed or not state.running then
  return { "ok", 0, 0 }
elseif state.resumable > now() then
  return { "ok", 0, state.resumable }
end
if ARGV[FIRST] ~= "" then
  log_finish(state.length, state.generation, ARGV[FIRST])
  set({ epoch = state.epoch + 1, owner = "", lease = "0", resumable = "0", finished = ARGV[FIRST] })
  return { "ok", 1, 0 }
end
return { "ok", 1, state.resumable }
