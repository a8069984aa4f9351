-- One row per effect of a node on the world outside (a payment, a mail, a ticket): intended before it is tried, with a
-- receipt when it is done. An intent without a receipt was cut off: nobody here knows whether the effect took place.
CREATE TABLE tickd.effects (
    space       integer NOT NULL,
    key         uuid NOT NULL,
    graph       text NOT NULL,
    fire_time   timestamptz NOT NULL,
    node        text NOT NULL,
    name        text NOT NULL,
    token       bigint NOT NULL,
    attempt     integer NOT NULL,
    replica     text NOT NULL,
    intended_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    received_at timestamptz,
    receipt     jsonb,
    PRIMARY KEY (space, key)
);

CREATE INDEX effects_by_tick ON tickd.effects (space, graph, fire_time);
