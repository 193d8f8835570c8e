"""LMDB: environments, tables, rows, the writer thread; the only importer of lmdb."""
