-- The tables of the example graph restock_plan. `tickd dev` runs this file once, when it makes its database.
CREATE SCHEMA warehouse;

CREATE TABLE warehouse.stock (
    sku           text PRIMARY KEY,
    name          text NOT NULL,
    on_hand       integer NOT NULL,
    counted_at    timestamptz NOT NULL DEFAULT now(),
    sold_per_hour integer NOT NULL,
    reorder_point integer NOT NULL,
    order_up_to   integer NOT NULL
);

CREATE TABLE warehouse.purchase_order (
    id          integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    sku         text NOT NULL REFERENCES warehouse.stock,
    quantity    integer NOT NULL,
    received_at timestamptz
);

CREATE TABLE warehouse.supplier_offer (
    supplier   text NOT NULL,
    sku        text NOT NULL REFERENCES warehouse.stock,
    unit_cents integer NOT NULL,
    pack_size  integer NOT NULL,
    available  integer NOT NULL,
    lead_hours integer NOT NULL,
    PRIMARY KEY (supplier, sku)
);

-- One plan per tick: the fire time is what makes writing it twice harmless.
CREATE TABLE warehouse.purchase_plan (
    fire_time  timestamptz NOT NULL,
    sku        text NOT NULL REFERENCES warehouse.stock,
    supplier   text NOT NULL,
    quantity   integer NOT NULL,
    unit_cents integer NOT NULL,
    PRIMARY KEY (fire_time, sku)
);

INSERT INTO warehouse.stock (sku, name, on_hand, sold_per_hour, reorder_point, order_up_to) VALUES
    ('bolt-m6',   'Hexagon bolt M6',   1200, 360,  400, 2000),
    ('bolt-m8',   'Hexagon bolt M8',    900, 240,  300, 1500),
    ('cable-5m',  'Extension cable',     80,   6,   40,  160),
    ('drill-4',   'Drill bit 4 mm',     340,  60,  120,  500),
    ('filler',    'Wood filler',         25,   9,   30,  120),
    ('gloves-l',  'Work gloves L',      150,  45,   60,  300),
    ('lamp-led',  'LED lamp',            60,   3,   20,  100),
    ('nut-m6',    'Nut M6',            1500, 400,  500, 2500),
    ('paint-w',   'White paint 10 l',    18,   2,   12,   48),
    ('sand-120',  'Sandpaper 120',      700, 180,  250, 1000),
    ('tape-50',   'Masking tape',       210,  75,   90,  400),
    ('washer-6',  'Washer M6',         1000, 420,  600, 3000);

INSERT INTO warehouse.purchase_order (sku, quantity, received_at) VALUES
    ('filler',   60, NULL),
    ('bolt-m6', 800, NULL),
    ('nut-m6', 1000, now()),
    ('tape-50', 100, NULL);

INSERT INTO warehouse.supplier_offer (supplier, sku, unit_cents, pack_size, available, lead_hours) VALUES
    ('northbolt',  'bolt-m6',     6, 200, 20000,  2),
    ('northbolt',  'bolt-m8',     8, 200, 20000,  2),
    ('northbolt',  'nut-m6',      3, 500, 40000,  2),
    ('northbolt',  'washer-6',    2, 500, 40000,  2),
    ('allround',   'bolt-m6',     7, 100,  5000,  1),
    ('allround',   'cable-5m',  890,   5,   200,  4),
    ('allround',   'drill-4',   120,  10,  1000,  4),
    ('allround',   'filler',    340,   6,   600,  4),
    ('allround',   'gloves-l',  210,  12,   600,  4),
    ('allround',   'lamp-led',  450,  10,   300,  4),
    ('allround',   'paint-w',  2900,   4,    20,  8),
    ('allround',   'tape-50',    95,  24,  2400,  4),
    ('abrasives',  'sand-120',   22,  50,  5000,  3),
    ('abrasives',  'drill-4',   105,  25,   500, 12),
    ('abrasives',  'tape-50',    90,  48,   960,  6);
