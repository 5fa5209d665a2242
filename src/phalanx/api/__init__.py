"""The public functions of Phalanx; `import phalanx` names them, and the command line prints what they return."""
