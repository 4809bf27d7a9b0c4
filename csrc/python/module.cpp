// moelora._C: the texts that do not fit an op's schema (kernel tables, why a call takes a path). Everything else works
// without this module.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

PYBIND11_MODULE(_C, m) { m.doc() = "Kernel tables and path explanations of moelora, as text."; }
