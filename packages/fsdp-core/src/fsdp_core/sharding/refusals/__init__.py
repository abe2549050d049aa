"""What is refused of a module that is sharded, or that can not be: each with what to write instead."""
