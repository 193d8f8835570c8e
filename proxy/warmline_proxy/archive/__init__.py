"""Archives of conversations: tar frame, manifest, export and import.  Imports index and store; any one thread."""
