"""The C++ of the engine, how it is built, and how Python calls it."""
