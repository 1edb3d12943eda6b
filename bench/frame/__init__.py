"""What all benches share: the command line, rounds and tables, servers, rows, writers. A bench is a file next to it."""
