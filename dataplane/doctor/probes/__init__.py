"""Small programs that ask a foreign library or the kernel one thing, and print the answer as JSON.

Run by path (see `dataplane.doctor.child`), so that they start in milliseconds: all but `owner` import nothing of this
project.
"""
