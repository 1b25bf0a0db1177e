-- Records, decisions, secrets and the audit log.
--
-- Every primary key and every statement on the request path begins with tenant_scope: that is the
-- distribution key, so the same schema runs on one PostgreSQL, on a hash-partitioned one and on a
-- distributed one. No sequences, no foreign keys between hot tables, no triggers, no advisory locks.
--
-- No index names a column that a completion changes: a single one, even partial, would end HOT
-- updates of the record table. The two generated columns are null before and after an ordinary
-- completion, so their indexes cost it nothing. A batch completes all rows of a page at once, and
-- its completed rows are a little longer than its pending ones: at a fill factor of 45 the page has
-- room for both. Measured with batches of 64: 100 % of completions are HOT, 47 % at 70, and both
-- the table and its indexes are smaller.
--
-- Keys are compared byte for byte (collation "C"): prefix searches use the index, and a new
-- version of the system's collations can't break it.

create table eec_routing_idempotency (
    tenant_scope        text        collate "C" not null,
    pool_id             text        collate "C" not null,
    idempotency_key     text        collate "C" not null,
    status              text        not null default 'pending'
                        check (status in ('pending', 'completed', 'failed_before_commit', 'outcome_unknown')),
    -- Stamped at every claim, never reused.
    attempt_token       uuid        not null default '00000000-0000-0000-0000-000000000000',
    -- One life of a key.
    generation          bigint      not null default 1,
    generation_id       uuid        not null default '00000000-0000-0000-0000-000000000000',
    -- Keyed hash of the request; null compares equal to everything.
    fingerprint         bytea,
    fingerprint_version integer,
    -- Whether an attempt of this generation may have reached the upstream and got no answer.
    maybe_sent          boolean     not null default false,
    -- Whether another gateway wants to be woken.
    awaited             boolean     not null default false,
    -- The terms, stamped at the claim.
    lease_ms            bigint      not null default 5000,
    valid_for_ms        bigint      not null default 86400000,
    tombstone_for_ms    bigint      not null default 0,
    on_unknown          text        not null default 'hold' check (on_unknown in ('hold', 'redrive')),
    decision_id         uuid,
    -- Null while pending: no lease, the row stays until an operator acts.
    lease_expires_at    timestamptz,
    -- Set by a completion and by a release.
    valid_until         timestamptz,
    created_at          timestamptz not null default now(),
    -- Set at each claim, else unchanged, so that its index keeps updates HOT.
    reserved_at         timestamptz not null default now(),
    -- Set while the outcome is unknown, so that such rows are found at once.
    unknown_reserved_at timestamptz generated always as
                        (case when status = 'outcome_unknown' then reserved_at end) stored,
    -- Set when no decision's end brings retention to this row.
    purge_from          timestamptz generated always as
                        (case when status = 'failed_before_commit'
                                or (status = 'completed' and tombstone_for_ms > 0)
                         then valid_until end) stored,
    primary key (tenant_scope, pool_id, idempotency_key)
) with (fillfactor = 45, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

-- How the sweeper finds its candidates, oldest first.
create index eec_routing_idempotency_reserved_at on eec_routing_idempotency (reserved_at);
-- How operators and gauges find what nobody knows.
create index eec_routing_idempotency_unknown on eec_routing_idempotency (unknown_reserved_at)
    where unknown_reserved_at is not null;
-- How retention finds what has no decision, or outlives it.
create index eec_routing_idempotency_purge on eec_routing_idempotency (purge_from)
    where purge_from is not null;

create table eec_routing_decision (
    tenant_scope        text        collate "C" not null,
    decision_id         uuid        not null,
    pool_id             text        collate "C" not null,
    idempotency_key     text        collate "C" not null,
    generation_id       uuid        not null,
    -- 'gateway', or 'operator:NAME'.
    decided_by          text        not null,
    created_at          timestamptz not null,
    valid_until         timestamptz not null,
    answer_status       smallint    not null,
    answer_headers      bytea       not null,
    cors_origin         bytea,
    cors_headers        bytea,
    -- Null: the body was not kept, the answer can't be replayed.
    answer_body         bytea,
    primary key (tenant_scope, decision_id)
) with (autovacuum_vacuum_scale_factor = 0.05, toast.autovacuum_vacuum_scale_factor = 0.05);

-- How retention finds decisions past their validity, and their records with them.
create index eec_routing_decision_valid_until on eec_routing_decision (valid_until);

create table eec_secret (
    version             integer     primary key,
    secret              bytea       not null check (length(secret) = 32),
    created_at          timestamptz not null default now()
);

create table eec_operator_audit (
    tenant_scope        text        collate "C" not null,
    audit_id            uuid        not null,
    at                  timestamptz not null default now(),
    operator            text        not null,
    action              text        not null,
    pool_id             text        not null,
    idempotency_key     text        not null,
    reason              text        not null,
    primary key (tenant_scope, audit_id)
);
