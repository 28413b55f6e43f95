"""The `kvoffload` command: argument parsing, progress display and printed output.

The package knows no on-disk format. The libraries behind the commands are `replay`, `bench` and
`facade.maintenance`.
"""
