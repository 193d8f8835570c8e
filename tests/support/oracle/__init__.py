"""Oracle: warm answers of a real pair compared with cold ones, in random order of requests, kills and purges."""
