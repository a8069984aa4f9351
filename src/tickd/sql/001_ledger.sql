-- The ledger: who ran which tick, under which token, and how it ended. Run in one transaction, serialised by the caller.
CREATE SCHEMA IF NOT EXISTS tickd;

CREATE TABLE tickd.migrations (
    version    integer PRIMARY KEY,
    applied_at timestamptz NOT NULL DEFAULT now()
);

-- One row per graph that ever ran. The token grows with every hold; the key is its lock's, for a look into pg_locks.
CREATE TABLE tickd.graphs (
    space integer NOT NULL,
    graph text NOT NULL,
    key   integer NOT NULL,
    token bigint NOT NULL,
    PRIMARY KEY (space, graph)
);

-- One row per admitted tick. outcome IS NULL: it runs, or it is abandoned.
CREATE TABLE tickd.ticks (
    space       integer NOT NULL,
    graph       text NOT NULL,
    fire_time   timestamptz NOT NULL,
    attempt     integer NOT NULL,
    token       bigint NOT NULL,
    replica     text NOT NULL,
    thread_id   text NOT NULL,
    run_id      uuid NOT NULL,
    admitted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at timestamptz,
    outcome     text,
    error_type  text,
    error       text,
    PRIMARY KEY (space, graph, fire_time)
);

-- What a sweep reads: few rows, however long the ledger gets.
CREATE INDEX ticks_unfinished ON tickd.ticks (space, graph, fire_time) WHERE outcome IS NULL OR outcome = 'handed_off';

-- One row per thread that tickd protects, with the token of the hold that may write to it.
CREATE TABLE tickd.threads (
    thread_id text PRIMARY KEY,
    space     integer NOT NULL,
    graph     text NOT NULL,
    token     bigint NOT NULL
);
