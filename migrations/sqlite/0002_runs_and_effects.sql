-- Runs, their history and attempts, and the outbox. The same tables and columns as on PostgreSQL.
--
-- A run belongs to the decision that started it and bears its id. Only ticks write eec_run and
-- eec_run_transition; an intent's claims and ends write eec_effect_intent and eec_run_attempt.

create table eec_run (
    tenant_scope        text        not null,
    -- The id of the decision that started it.
    run_id              blob        not null,
    -- Counts committed ticks, from 1; every update is conditional on it.
    record_version      integer     not null default 1,
    -- The seq of the newest row of eec_run_transition; no number is left out.
    last_transition_seq integer     not null default 1,
    status              text        not null
                        check (status in ('running', 'waiting', 'stuck', 'completed', 'failed', 'compensated', 'cancelled')),
    workflow            text        not null,
    pool_id             text        not null,
    idempotency_key     text        not null,
    -- Whether the record of its key is not reclaimable before the run is final.
    holds_record        integer     not null default 0,
    -- What to do and what it is about; never changed. JSON.
    definition          blob        not null,
    input               blob        not null,
    -- How far it is. JSON.
    progress            blob        not null,
    -- Why it is stuck, failed or cancelled.
    reason              text,
    -- When a timer of it ends; null: it waits for none.
    due_at              integer,
    created_at          integer     not null default (cast(unixepoch('subsec') * 1000 as integer)),
    updated_at          integer     not null default (cast(unixepoch('subsec') * 1000 as integer)),
    -- Set once it is final.
    ended_at            integer,
    primary key (tenant_scope, run_id)
);

-- How operators find a run by its id alone.
create index eec_run_run_id on eec_run (run_id);
-- How ended timers are found.
create index eec_run_due_at on eec_run (due_at, tenant_scope, run_id) where due_at is not null;
-- How operators find what does not go on by itself.
create index eec_run_stuck on eec_run (tenant_scope, run_id) where status = 'stuck';
-- How the gauges count what is not over.
create index eec_run_open on eec_run (status) where status in ('running', 'waiting', 'stuck');
-- How retention finds what is over.
create index eec_run_ended_at on eec_run (ended_at) where ended_at is not null;

-- Append-only.
create table eec_run_transition (
    tenant_scope        text        not null,
    run_id              blob        not null,
    seq                 integer     not null,
    record_version      integer     not null,
    -- Drawn for each commit of a tick: how a commit whose reply was lost is recognised.
    tick_id             blob        not null,
    at                  integer     not null default (cast(unixepoch('subsec') * 1000 as integer)),
    kind                text        not null,
    step                text,
    -- JSON.
    detail              blob,
    -- Of the input that caused it; an input is applied once.
    stamp               blob,
    primary key (tenant_scope, run_id, seq)
);

create unique index eec_run_transition_stamp on eec_run_transition (tenant_scope, run_id, stamp)
    where stamp is not null;

create table eec_effect_intent (
    tenant_scope        text        not null,
    intent_id           blob        not null,
    run_id              blob        not null,
    -- Its place within the run, from 1. Intents of a run are dispatched one after another.
    seq                 integer     not null,
    step                text        not null,
    status              text        not null default 'pending'
                        check (status in ('pending', 'completed', 'dead', 'quarantined', 'discarded')),
    -- The lane: what shares a cap, a breaker and a fate.
    destination         text        not null,
    idempotency_key     text        not null,
    -- How to send it: target, retries, limits. JSON; never changed.
    sending             blob        not null,
    horizon_ms          integer     not null,
    -- Of the present claim, which is also its attempt's stamp; null: nobody has it.
    claim_token         blob,
    -- When it may be claimed: its first turn, the next try, or the end of the claim. Null: it waits
    -- for its turn, or is final.
    due_at              integer,
    -- When its turn came or it was redriven; from the first try after that on, when that was: the
    -- horizon counts from here.
    first_due_at        integer,
    -- Claims that were not given back.
    tries               integer     not null default 0,
    -- Of these, before the newest redrive: pauses and the horizon count from there.
    tries_before        integer     not null default 0,
    -- Tries that failed for a fault of the item itself.
    faults              integer     not null default 0,
    -- Claims in a row that ended without a word.
    deaths              integer     not null default 0,
    redrives            integer     not null default 0,
    -- Its run does not want it any more: not to be claimed again.
    withdrawn           integer     not null default 0,
    -- Its run does not know the present status yet.
    changed             integer     not null default 0,
    -- Whether the bytes to send are still there; those of what is dead are not kept for ever.
    has_body            integer     not null default 1,
    -- Of the newest try.
    outcome             text,
    answer_status       integer,
    diagnostic          text,
    created_at          integer     not null default (cast(unixepoch('subsec') * 1000 as integer)),
    -- Set once it is final, dead or quarantined.
    ended_at            integer,
    primary key (tenant_scope, intent_id)
);

create unique index eec_effect_intent_run on eec_effect_intent (tenant_scope, run_id, seq);
-- How lanes with something due are found, and what is due in each.
create index eec_effect_intent_due on eec_effect_intent (tenant_scope, destination, due_at)
    where due_at is not null;
-- How runs are found that don't know what became of their intents.
create index eec_effect_intent_changed on eec_effect_intent (tenant_scope, run_id) where changed;
-- How operators find an intent by its id alone, and what can't be delivered.
create index eec_effect_intent_intent_id on eec_effect_intent (intent_id);
create index eec_effect_intent_dead on eec_effect_intent (tenant_scope, destination, ended_at)
    where status in ('dead', 'quarantined');
-- How retention finds bytes of what is dead for long.
create index eec_effect_intent_dead_body on eec_effect_intent (ended_at)
    where has_body and status in ('dead', 'quarantined');
-- How the oldest that is not sent is found.
create index eec_effect_intent_unsent on eec_effect_intent (first_due_at)
    where status = 'pending' and first_due_at is not null;

-- Insert-only: the bytes that are sent, the same at every try, and those of the answer.
create table eec_effect_body (
    tenant_scope        text        not null,
    intent_id           blob        not null,
    part                text        not null check (part in ('message', 'answer')),
    -- Of an answer.
    status              integer,
    headers             blob,
    body                blob,
    primary key (tenant_scope, intent_id, part)
);

-- One row for each claim of an intent.
create table eec_run_attempt (
    tenant_scope        text        not null,
    run_id              blob        not null,
    intent_id           blob        not null,
    -- The claim's token.
    stamp               blob        not null,
    try                 integer     not null,
    status              text        not null default 'open'
                        check (status in ('open', 'delivered', 'failed', 'released', 'lost')),
    worker              text        not null,
    started_at          integer     not null default (cast(unixepoch('subsec') * 1000 as integer)),
    ended_at            integer,
    outcome             text,
    answer_status       integer,
    diagnostic          text,
    primary key (tenant_scope, run_id, stamp)
);

-- Destinations that an operator paused; shared by all gateways.
create table eec_destination_pause (
    destination         text        primary key,
    paused_at           integer     not null default (cast(unixepoch('subsec') * 1000 as integer)),
    operator            text        not null,
    reason              text        not null
);

-- Claims of callers of the API: the same request_id is always the same claim.
create table eec_routing_claim (
    tenant_scope        text        not null,
    request_id          blob        not null,
    pool_id             text        not null,
    idempotency_key     text        not null,
    attempt_token       blob        not null,
    generation          integer     not null,
    generation_id       blob        not null,
    lease_ms            integer     not null,
    created_at          integer     not null default (cast(unixepoch('subsec') * 1000 as integer)),
    keep_until          integer     not null,
    primary key (tenant_scope, request_id)
);

create index eec_routing_claim_keep_until on eec_routing_claim (keep_until);
