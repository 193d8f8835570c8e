"""Real pair of proxy and backend as processes, with clients and waits."""
