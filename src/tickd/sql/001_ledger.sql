-- The ledger: who ran which tick, under which token, and how it ended. Run in one transaction, serialised by the caller.
CREATE SCHEMA IF NOT EXISTS tickd;

CREATE TABLE tickd.migrations (
    version    integer PRIMARY KEY,
    applied_at timestamptz NOT NULL DEFAULT now()
);

-- One row per lock space. While at least one replica fires, alive_at moves on; what lies between it and the start of the
-- first replica after all were down is what nobody fired.
CREATE TABLE tickd.spaces (
    space    integer PRIMARY KEY,
    alive_at timestamptz NOT NULL
);

-- One row per graph that any replica has had in its schedule. The token grows with every hold; the key is its lock's, for
-- a look into pg_locks. No fire time before fires_since is ever made up for: it moves when the graph is new, when its
-- calendar is edited, and when it is resumed after a pause.
CREATE TABLE tickd.graphs (
    space       integer NOT NULL,
    graph       text NOT NULL,
    key         integer NOT NULL,
    token       bigint NOT NULL DEFAULT 0,
    calendar    text,
    fires_since timestamptz NOT NULL DEFAULT clock_timestamp(),
    paused_at   timestamptz,
    PRIMARY KEY (space, graph)
);

-- One row per tick: admitted (skip mode), or due (claim mode). outcome IS NULL: it runs, or it waits, or its holder is gone.
CREATE TABLE tickd.ticks (
    space       integer NOT NULL,
    graph       text NOT NULL,
    fire_time   timestamptz NOT NULL,
    mode        text NOT NULL DEFAULT 'skip',
    attempt     integer NOT NULL,
    failures    integer NOT NULL DEFAULT 0,
    token       bigint,
    replica     text,
    thread_id   text NOT NULL,
    run_id      uuid NOT NULL,
    ready_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    admitted_at timestamptz,
    lease_until timestamptz,
    finished_at timestamptz,
    outcome     text,
    error_type  text,
    error       text,
    PRIMARY KEY (space, graph, fire_time)
);

-- What sweeps, claims and attempts read: few rows, however long the ledger gets.
CREATE INDEX ticks_open ON tickd.ticks (space, graph, fire_time)
    WHERE outcome IS NULL OR outcome IN ('handed_off', 'interrupted');

-- One row per thread that tickd protects, with the token of the hold that may write to it.
CREATE TABLE tickd.threads (
    thread_id text PRIMARY KEY,
    space     integer NOT NULL,
    graph     text NOT NULL,
    token     bigint NOT NULL,
    held_at   timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE INDEX threads_by_age ON tickd.threads (space, graph, held_at);
CREATE INDEX ticks_by_thread ON tickd.ticks (thread_id) WHERE outcome IS NULL OR outcome IN ('handed_off', 'interrupted');
