"""From a graph to programs of the native code."""
