"""`python -m energon_lite prepare ...`, where the script is not on the path."""

from energon_lite.extras.cli import main

if __name__ == "__main__":
    main()
