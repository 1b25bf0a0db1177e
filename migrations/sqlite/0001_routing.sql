-- Records, decisions, secrets and the audit log. Instants are milliseconds of Unix time, ids are
-- 16 bytes.
--
-- The same tables and columns as on PostgreSQL, other indexes: here an index on a column that changes
-- costs a page write and no more, so what is open and what is past its time is found directly.
-- Ordinary rowid tables: they are faster than WITHOUT ROWID for rows of this size.

create table eec_routing_idempotency (
    tenant_scope        text        not null,
    pool_id             text        not null,
    idempotency_key     text        not null,
    status              text        not null default 'pending'
                        check (status in ('pending', 'completed', 'failed_before_commit', 'outcome_unknown')),
    -- Stamped at every claim, never reused.
    attempt_token       blob        not null default x'00000000000000000000000000000000',
    -- One life of a key.
    generation          integer     not null default 1,
    generation_id       blob        not null default x'00000000000000000000000000000000',
    -- Keyed hash of the request; null compares equal to everything.
    fingerprint         blob,
    fingerprint_version integer,
    -- Whether an attempt of this generation may have reached the upstream and got no answer.
    maybe_sent          integer     not null default 0,
    -- Whether another gateway wants to be woken.
    awaited             integer     not null default 0,
    -- The terms, stamped at the claim.
    lease_ms            integer     not null default 5000,
    valid_for_ms        integer     not null default 86400000,
    tombstone_for_ms    integer     not null default 0,
    on_unknown          text        not null default 'hold' check (on_unknown in ('hold', 'redrive')),
    decision_id         blob,
    -- Null while pending: no lease, the row stays until an operator acts.
    lease_expires_at    integer,
    -- Set by a completion and by a release.
    valid_until         integer,
    created_at          integer     not null default (cast(unixepoch('subsec') * 1000 as integer)),
    -- Set at each claim, else unchanged.
    reserved_at         integer     not null default (cast(unixepoch('subsec') * 1000 as integer)),
    primary key (tenant_scope, pool_id, idempotency_key)
);

-- How the sweeper, the census and retention find their rows without looking at all the others.
create index eec_routing_idempotency_pending on eec_routing_idempotency (reserved_at)
    where status = 'pending';
create index eec_routing_idempotency_unknown on eec_routing_idempotency (reserved_at)
    where status = 'outcome_unknown';
create index eec_routing_idempotency_over on eec_routing_idempotency (valid_until + tombstone_for_ms)
    where valid_until is not null;

create table eec_routing_decision (
    tenant_scope        text        not null,
    decision_id         blob        not null,
    pool_id             text        not null,
    idempotency_key     text        not null,
    generation_id       blob        not null,
    -- 'gateway', or 'operator:NAME'.
    decided_by          text        not null,
    created_at          integer     not null,
    valid_until         integer     not null,
    answer_status       integer     not null,
    answer_headers      blob        not null,
    cors_origin         blob,
    cors_headers        blob,
    -- Null: the body was not kept, the answer can't be replayed.
    answer_body         blob,
    primary key (tenant_scope, decision_id)
);

create index eec_routing_decision_over on eec_routing_decision (valid_until);

create table eec_secret (
    version             integer     primary key,
    secret              blob        not null check (length(secret) = 32),
    created_at          integer     not null
);

create table eec_operator_audit (
    tenant_scope        text        not null,
    audit_id            blob        not null,
    at                  integer     not null,
    operator            text        not null,
    action              text        not null,
    pool_id             text        not null,
    idempotency_key     text        not null,
    reason              text        not null,
    primary key (tenant_scope, audit_id)
);

-- The newest instant that this file has seen: its clock never runs backwards, also over a restart.
create table eec_clock (
    id                  integer     primary key check (id = 1),
    seen_at             integer     not null
);
