-- What all scripts of a session share; each is read together with this file.
-- KEYS: record, log. ARGV begins with: lease in ms, resume_ttl in ms, ttl in ms.
-- Replies are {"ok", ...} or a refusal: {"missing"}, {"closed"}, {"superseded", epoch, owner}, {"behind", epoch},
-- {"gap", length}, {"conflict", length}, {"busy"}, {"ended", reason} or {"changed"}. A refused script wrote nothing.
local RECORD, LOG = KEYS[1], KEYS[2]
local FIRST = 4 -- a script's own first argument

local function text(number) -- Lua itself writes large numbers with an exponent
  return string.format("%.0f", number)
end

local function now()
  local time = redis.call("TIME")
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- What the scripts decide by; nil if there is no such session.
local function load()
  local names = { "epoch", "owner", "length", "generation", "finished", "lease", "resumable", "closed" }
  local values = redis.call("HMGET", RECORD, unpack(names))
  if not values[1] then
    return nil
  end
  local state = {}
  for i, name in ipairs(names) do
    state[name] = values[i]
  end
  for _, name in ipairs({ "epoch", "length", "generation", "lease", "resumable" }) do
    state[name] = tonumber(state[name])
  end
  state.closed = state.closed ~= ""
  state.running = state.generation > 0 and state.finished == ""
  return state
end

-- Why a caller that owns the session under `epoch` and knows of `length` durable tokens is refused; nil if not.
-- Epochs alone do not distinguish owners: after Redis lost an acquisition, another router may get the same epoch.
local function refusal(state, epoch, owner, length)
  if not state then
    return { "missing" }
  elseif state.closed then
    return { "closed" }
  elseif epoch < state.epoch or (epoch == state.epoch and owner ~= state.owner) then
    return { "superseded", state.epoch, state.owner }
  elseif epoch > state.epoch then
    return { "behind", state.epoch }
  elseif length > state.length then
    return { "gap", state.length }
  end
  return nil
end

-- Writes the fields of a table into the record.
local function set(fields)
  local flat = {}
  for name, value in pairs(fields) do
    flat[#flat + 1] = name
    flat[#flat + 1] = value
  end
  redis.call("HSET", RECORD, unpack(flat))
end

-- Gives the owner a new lease.
local function lend(fields, running)
  local ends = now() + ARGV[1]
  fields.lease = text(ends)
  fields.resumable = running and text(ends + ARGV[2]) or "0"
end

-- Renews the lease if it was not given up: a late repetition must not bring it back.
local function renew(fields, state)
  if state.lease ~= 0 then
    lend(fields, state.running)
  end
end

local function touch()
  redis.call("PEXPIRE", RECORD, ARGV[3])
  redis.call("PEXPIRE", LOG, ARGV[3])
end

local function log_tokens(position, tokens, logprobs)
  local fields = { "t", tokens }
  if logprobs ~= "" then
    fields = { "t", tokens, "l", logprobs }
  end
  redis.call("XADD", LOG, text(position + 1) .. "-0", unpack(fields))
end

local function log_finish(length, generation, reason)
  redis.call("XADD", LOG, text(length) .. "-" .. text(generation), "finish", reason)
end
