-- The last replica to stop says so: then nobody lives whom only a restart of the server has hidden.
ALTER TABLE tickd.spaces ADD COLUMN deserted boolean NOT NULL DEFAULT false;
