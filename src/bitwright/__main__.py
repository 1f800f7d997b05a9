"""`python -m bitwright`, for torchrun."""

from bitwright.cli import main

if __name__ == "__main__":
    main()
