-- Makes committed tokens durable.
-- ARGV: epoch, owner, start, tokens (4 bytes each), log-probabilities, bytes of these a token, digest after the
-- tokens, then record fields and their new values. Replies {"ok", length}.
local epoch, owner, start, tokens = tonumber(ARGV[FIRST]), ARGV[FIRST + 1], tonumber(ARGV[FIRST + 2]), ARGV[FIRST + 3]
local logprobs, stride, digest = ARGV[FIRST + 4], tonumber(ARGV[FIRST + 5]), ARGV[FIRST + 6]
local state = load()
local refused = refusal(state, epoch, owner, start)
if refused then
  return refused
end

local length, stop = state.length, start + #tokens / 4
local present = math.min(stop, length)
if start < present then
  -- What is there already has to be the same. Entries may be cut differently from ours.
  local first = redis.call("XREVRANGE", LOG, text(start + 1) .. "-0", "-", "COUNT", 1)
  local from = first[1] and first[1][1] or "-"
  local position = start
  for _, entry in ipairs(redis.call("XRANGE", LOG, from, text(present) .. "-0")) do
    local at = tonumber(string.match(entry[1], "^(%d+)-0$"))
    if at then
      at = at - 1
      local bytes = entry[2][2]
      local upto = math.min(present, at + #bytes / 4)
      local ours = string.sub(tokens, (position - start) * 4 + 1, (upto - start) * 4)
      local theirs = string.sub(bytes, (position - at) * 4 + 1, (upto - at) * 4)
      if at > position or ours ~= theirs then
        return { "conflict", length }
      end
      position = upto
    end
  end
  if position < present then
    return { "conflict", length }
  end
end
if stop > length and not state.running then
  return { "ended", state.finished }
end

local fields = {}
renew(fields, state)
if stop >= length then -- an older append that arrives late must not undo a newer one's changes
  for i = FIRST + 7, #ARGV, 2 do
    fields[ARGV[i]] = ARGV[i + 1]
  end
end
if stop > length then
  log_tokens(length, string.sub(tokens, (length - start) * 4 + 1), string.sub(logprobs, (length - start) * stride + 1))
  fields.length = text(stop)
  fields.digest = digest
  length = stop
end
if next(fields) then
  set(fields)
end
touch()
return { "ok", length }
