"""Let ``python -m kvmoor`` do what ``kvmoor`` does."""

from kvmoor.cli.main import main

if __name__ == "__main__":
    main()
