-- At each admission, the thread that the graph's hold before was on is looked up; there is one at most.
CREATE INDEX threads_live ON tickd.threads (space, graph) WHERE token > 0;
