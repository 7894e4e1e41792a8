"""The command line: ``kvmoor``. Imported only when it runs, so that the library needs neither typer nor rich."""
