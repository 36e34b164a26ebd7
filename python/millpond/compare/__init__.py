"""`millpond bench compare`: ours beside the others, in turn, on this machine.

Each way of having memory, or of handing it over, is a *mode*: a process of its own (with a receiver where there is one). All of
them are alive from the start, on one CPU, and measured in many short slices, ours and another's in turn. What is compared is the
ratio of two neighbouring slices, and what is said is the median of those over the rounds, with its quartiles: a machine whose
clocks change in between changes both.

`replay` also says how much each allocator reserves for a trace, and how long its single calls take: a slice there is a whole trace.
"""
