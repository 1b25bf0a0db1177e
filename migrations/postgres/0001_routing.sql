-- Records, decisions, secrets and the audit log.
--
-- Every primary key and every statement on the request path begins with tenant_scope: that is the
-- distribution key, so the same schema runs on one PostgreSQL, on a hash-partitioned one and on a
-- distributed one. No sequences, no foreign keys between hot tables, no triggers, no advisory locks.
--
-- No index names a column that changes after the claim: a single one, even partial, would end
-- HOT updates of the record table.

create table eec_routing_idempotency (
    tenant_scope        text        not null,
    pool_id             text        not null,
    idempotency_key     text        not null,
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
    primary key (tenant_scope, pool_id, idempotency_key)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

-- How the sweeper and retention find their candidates, oldest first.
create index eec_routing_idempotency_reserved_at on eec_routing_idempotency (reserved_at);

create table eec_routing_decision (
    tenant_scope        text        not null,
    decision_id         uuid        not null,
    pool_id             text        not null,
    idempotency_key     text        not null,
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
);

create table eec_secret (
    version             integer     primary key,
    secret              bytea       not null check (length(secret) = 32),
    created_at          timestamptz not null default now()
);

create table eec_operator_audit (
    tenant_scope        text        not null,
    audit_id            uuid        not null,
    at                  timestamptz not null default now(),
    operator            text        not null,
    action              text        not null,
    pool_id             text        not null,
    idempotency_key     text        not null,
    reason              text        not null,
    primary key (tenant_scope, audit_id)
);
