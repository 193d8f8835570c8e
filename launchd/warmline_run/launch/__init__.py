"""`warmline launch`: a client, started with the settings that have it use a pair."""
