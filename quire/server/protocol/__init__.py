"""Request and response bodies as structs, with the checks that types cannot express."""
