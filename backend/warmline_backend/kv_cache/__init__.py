"""KV of sequences: codecs, residents, segment files.  Imports request and config only.  Engine thread, but file I/O."""
