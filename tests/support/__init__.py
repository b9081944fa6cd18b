"""What tests of several files share. Tests import it as `support`: pytest has the folder of the tests on its path."""
