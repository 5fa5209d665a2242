"""The public functions of Phalanx. `import phalanx` exports them, and the command line prints their results.

Functions import numpy, torch and most packages of Phalanx when they are called, so that `import phalanx` and `phalanx
--help` stay fast.
"""
