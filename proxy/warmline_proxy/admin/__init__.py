"""What a home's owner may see and do, over HTTP; `access` says who that is.

Each module has handlers and a table of the paths that they answer; their state is others'.
"""
