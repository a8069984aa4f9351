-- The guard: lets a row of the saver's tables be written only by whoever writes under the thread's present hold.
--
-- A thread's hold is that of the graph's newest admission, if that was on this thread; an admission on another thread of
-- the graph leaves this one under token 0, which nobody has.
--
-- A writer names its hold as space/graph/token in the setting tickd.token, for its own transaction. The thread's row of
-- tickd.threads is read FOR SHARE: an admission, which updates the row, waits for the writes that are under way, and a
-- write that had to wait for an admission reads the row again as the admission left it. READ COMMITTED re-reads; under a
-- stricter level Postgres fails such a write with 40001.
--
-- SECURITY DEFINER, so that those who write to other threads of these tables need no right on tickd's. It has no SET
-- search_path, which would cost as much as the check itself; instead every name and operator is qualified, and nothing
-- that resolves an operator in silence (IN, IS DISTINCT FROM, NULLIF) is used.

-- For each row that is written; it is on the path of every checkpoint, hence as little as can be.
CREATE OR REPLACE FUNCTION tickd.guard_write() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    hold pg_catalog.text;
BEGIN
    SELECT pg_catalog.concat_ws('/', t.space, t.graph, t.token) INTO hold
    FROM tickd.threads AS t
    WHERE t.thread_id OPERATOR(pg_catalog.=) NEW.thread_id
    FOR SHARE;
    -- Null, hence passed, for a thread that tickd does not know.
    IF hold OPERATOR(pg_catalog.<>) COALESCE(pg_catalog.current_setting('tickd.token', true), '') THEN
        PERFORM tickd.refuse_write(NEW.thread_id);
    END IF;
    RETURN NEW;
END $$;

-- For a row that is moved to another thread: the thread that it leaves.
CREATE OR REPLACE FUNCTION tickd.guard_move() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    PERFORM tickd.check_thread(OLD.thread_id);
    RETURN NEW;
END $$;

-- For the rows that a statement has deleted: one check per thread, for a prune deletes many rows of one.
CREATE OR REPLACE FUNCTION tickd.guard_delete() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    thread pg_catalog.text;
BEGIN
    FOR thread IN SELECT DISTINCT d.thread_id FROM deleted AS d LOOP
        PERFORM tickd.check_thread(thread);
    END LOOP;
    RETURN NULL;
END $$;

-- For a table that is about to be emptied as a whole.
CREATE OR REPLACE FUNCTION tickd.guard_truncate() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    -- The order matters: TRUNCATE has locked the saver's table against writes before this runs.
    IF EXISTS (SELECT FROM tickd.threads) THEN
        RAISE EXCEPTION USING
            ERRCODE = 'TK001',
            MESSAGE = pg_catalog.format(
                'tickd refused to truncate %I: it has threads under the protection of tickd', TG_TABLE_NAME),
            HINT = 'Delete the rows of single threads instead, or empty tickd.threads first while no graph is held.';
    END IF;
    RETURN NULL;
END $$;

-- For the graph whose token has grown: what an earlier hold was admitted on is nobody's now. It waits for the writes under
-- way there, too.
CREATE OR REPLACE FUNCTION tickd.guard_supersede() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE tickd.threads AS t
    SET token = 0
    WHERE t.space = NEW.space AND t.graph = NEW.graph AND t.token > 0 AND t.token <> NEW.token;
    RETURN NULL;
END $$;

-- Called by the above, hence with the rights of their owner.
CREATE OR REPLACE FUNCTION tickd.check_thread(thread pg_catalog.text) RETURNS pg_catalog.void
LANGUAGE plpgsql AS $$
DECLARE
    hold pg_catalog.text;
BEGIN
    SELECT pg_catalog.concat_ws('/', t.space, t.graph, t.token) INTO hold
    FROM tickd.threads AS t
    WHERE t.thread_id OPERATOR(pg_catalog.=) thread
    FOR SHARE;
    IF hold OPERATOR(pg_catalog.<>) COALESCE(pg_catalog.current_setting('tickd.token', true), '') THEN
        PERFORM tickd.refuse_write(thread);
    END IF;
END $$;

CREATE OR REPLACE FUNCTION tickd.refuse_write(thread pg_catalog.text) RETURNS pg_catalog.void
LANGUAGE plpgsql AS $$
DECLARE
    writer pg_catalog.text := COALESCE(pg_catalog.current_setting('tickd.token', true), '');
    fence  tickd.threads;
    newest pg_catalog.int8;
BEGIN
    SELECT t.* INTO fence FROM tickd.threads AS t WHERE t.thread_id OPERATOR(pg_catalog.=) thread;
    SELECT g.token INTO newest
    FROM tickd.graphs AS g
    WHERE g.space OPERATOR(pg_catalog.=) fence.space AND g.graph OPERATOR(pg_catalog.=) fence.graph;
    RAISE EXCEPTION USING
        ERRCODE = 'TK001',
        MESSAGE = pg_catalog.format(
            'tickd refused a write to thread %s: graph %s (lock space %s) is held under token %s%s, this writer has %s',
            thread, fence.graph, fence.space,
            CASE WHEN fence.token OPERATOR(pg_catalog.=) 0 THEN newest ELSE fence.token END,
            CASE WHEN fence.token OPERATOR(pg_catalog.=) 0 THEN ' on another thread' ELSE '' END,
            CASE
                WHEN writer OPERATOR(pg_catalog.=) '' THEN 'none'
                WHEN pg_catalog.starts_with(writer, pg_catalog.concat_ws('/', fence.space, fence.graph, ''))
                THEN 'token ' OPERATOR(pg_catalog.||) pg_catalog.regexp_replace(writer, '^.*/', '')
                ELSE 'the token of another graph, ' OPERATOR(pg_catalog.||) writer
            END),
        HINT = 'To write to this thread, take the graph''s lock with tickd.sole_writer and use the saver it gives. '
            'To end the protection of the thread, delete its row from tickd.threads.';
END $$;

-- What was admitted while no guard stood.
UPDATE tickd.threads AS t
SET token = 0
FROM tickd.graphs AS g
WHERE g.space = t.space AND g.graph = t.graph AND t.token > 0 AND t.token <> g.token;
