-- A small shop. How many rows comes in as settings demo.*, so that this file is plain
-- SQL which psql would run as well.

CREATE TABLE customers (
    id         bigint PRIMARY KEY,
    email      text NOT NULL,
    name       varchar(80) NOT NULL,
    tags       text[],
    balance    numeric(12,2) NOT NULL DEFAULT 0,
    vip        boolean NOT NULL DEFAULT false,
    born       date,
    created_at timestamptz NOT NULL
);

CREATE TABLE orders (
    id          bigint PRIMARY KEY,
    customer_id bigint NOT NULL,
    status      text NOT NULL DEFAULT 'new',
    total       numeric(12,2) NOT NULL,
    placed_at   timestamptz NOT NULL DEFAULT now(),
    note        text
);

CREATE TABLE order_lines (
    order_id bigint,
    line     integer,
    product  text NOT NULL,
    quantity smallint NOT NULL,
    price    numeric(10,2) NOT NULL,
    weight   double precision,
    discount real,
    PRIMARY KEY (order_id, line)
);

-- The document is over 2 kB of digits that do not compress: it lives in the TOAST
-- table, and an update that leaves it alone does not send it.
CREATE TABLE events (
    id          uuid PRIMARY KEY,
    happened_at timestamp NOT NULL,
    took        interval,
    kind        text NOT NULL,
    document    jsonb NOT NULL,
    picture     bytea,
    seen        boolean NOT NULL DEFAULT false
);

CREATE TABLE carts (
    id          bigint PRIMARY KEY,
    customer_id bigint NOT NULL,
    products    integer[] NOT NULL,
    updated_at  timestamptz NOT NULL DEFAULT now()
);

-- Tells the demo how far the destinations are; its rows mean nothing.
CREATE TABLE heartbeat (
    id integer PRIMARY KEY,
    at timestamptz NOT NULL
);

CREATE FUNCTION event_id(n bigint) RETURNS uuid LANGUAGE sql IMMUTABLE
    AS $$ SELECT md5('event ' || n)::uuid $$;

CREATE FUNCTION event_document(n bigint) RETURNS jsonb LANGUAGE sql VOLATILE
    AS $$ SELECT jsonb_build_object('n', n, 'page', '/products/' || n % 977, 'digits',
              (SELECT string_agg(md5(random()::text || n || part), '') FROM generate_series(1, 90) AS part)) $$;

INSERT INTO customers
SELECT n, 'customer' || n || '@example.com',
       CASE n % 5 WHEN 0 THEN E'O\'Hara "\\' || n || E'"' WHEN 1 THEN 'Žofia ' || n WHEN 2 THEN E'two\nlines\t' || n ELSE 'Customer ' || n END,
       CASE n % 4 WHEN 0 THEN NULL WHEN 1 THEN '{}' WHEN 2 THEN ARRAY['new', NULL, 'a "b", {c}'] ELSE ARRAY['tag' || n % 7] END,
       CASE WHEN n % 1000 = 0 THEN 'NaN' ELSE round((n * 7919 % 1000000) / 100.0, 2) END,
       n % 50 = 0,
       CASE WHEN n % 2000 = 0 THEN 'infinity' WHEN n % 11 = 0 THEN NULL ELSE date '1950-01-01' + (n % 20000)::integer END,
       timestamptz '2024-01-01 00:00:00+00' + n * interval '37.000123 seconds'
FROM generate_series(1, current_setting('demo.customers')::bigint) AS n;

INSERT INTO orders
SELECT n, n * 31 % current_setting('demo.customers')::bigint + 1,
       (ARRAY['new', 'paid', 'shipped', 'returned'])[n % 4 + 1],
       round((n * 104729 % 500000) / 100.0, 2),
       timestamptz '2025-01-01 00:00:00+00' + n * interval '11.5 seconds',
       CASE n % 3 WHEN 0 THEN NULL WHEN 1 THEN '' ELSE 'leave at the door ' || n END
FROM generate_series(1, current_setting('demo.orders')::bigint) AS n;

INSERT INTO order_lines
SELECT n % current_setting('demo.orders')::bigint + 1, n / current_setting('demo.orders')::bigint + 1,
       'product ' || n % 977, n % 9 + 1, round((n * 7 % 100000) / 100.0, 2),
       CASE WHEN n % 3000 = 0 THEN '-Infinity' WHEN n % 13 = 0 THEN NULL ELSE n / 7.0::double precision END,
       (n % 10 / 100.0)::real
FROM generate_series(0, current_setting('demo.lines')::bigint - 1) AS n;

INSERT INTO events
SELECT event_id(n), timestamp '2025-06-01' + n * interval '0.700001 seconds',
       CASE WHEN n % 6 = 0 THEN NULL ELSE n * interval '1.25 seconds' END,
       (ARRAY['view', 'click', 'buy'])[n % 3 + 1], event_document(n),
       CASE WHEN n % 4 = 0 THEN decode(md5(n::text), 'hex') END
FROM generate_series(1, current_setting('demo.events')::bigint) AS n;

INSERT INTO carts
SELECT n, n % current_setting('demo.customers')::bigint + 1, ARRAY[n, n * 2, NULL]::integer[]
FROM generate_series(1, current_setting('demo.carts')::bigint) AS n;

INSERT INTO heartbeat VALUES (1, now());

ANALYZE;
