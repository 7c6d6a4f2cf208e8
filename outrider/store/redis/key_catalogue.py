"""All keys in Redis: what each holds, and when it is written. Grants of roles to them are in `acl`."""

KEYS = {
    "outrider:{*}:session": "a session's record: owner, epoch, turn; with each change of owner and each turn",
    "outrider:{*}:log": "a session's tokens; with each commit, before a client gets it",
    "outrider:{leases}*": "when sessions' leases end; with each lease that begins, is renewed or is given up",
    "outrider:idempotency:*": "the session of a request with an idempotency key; with the request",
    "outrider:responses:*": "the conversation up to a response of the gateway's, unless its request has `store: false`",
    "outrider:{workers}:id:*": "a verifier's announcement; every `heartbeat_s`",
    "outrider:{workers}:ids": "the ids of verifiers; with each announcement",
    "outrider:{workers}:drafter-id:*": "a drafter's announcement; every `heartbeat_s`",
    "outrider:{workers}:drafter-ids": "the ids of drafters; with each announcement",
    "outrider:{tickets}:keys": "routers' public keys; at a router's start, and again before they expire",
    "outrider:{keys}": "hashes of API keys; by `outrider keys`",
    "outrider:{keys}:readers": "whose drafters may read tenants' texts; written by `outrider keys readers`",
    "outrider:{adapters}*": "adapters by name; when one is loaded or unloaded",
    "outrider:{usage:*}:ends": "when a tenant's sessions expire; with each turn",
    "outrider:{usage:*}:bytes": "what a tenant's sessions take; with each turn",
    "outrider:{usage:*}:claims": "what a tenant's idempotency keys take; with each such request",
    "outrider:{acceptance}:*": "how many drafts were accepted at each depth, for new sessions; every few seconds",
    "outrider:{examples}:*": "training samples, of tenants that allow it; when a generation ends",
    "outrider:{versions}:*": "versions of a drafter that is trained online; with each version",
    "outrider:{verdicts}:*": "versions that are not to be used; when a drafter or the trainer finds that out",
}
