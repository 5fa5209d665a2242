"""The public functions of Phalanx. `import phalanx` exports them, and the command line prints their results."""
