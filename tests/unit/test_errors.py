import grpc

from exo.errors import ExoError, ModelNotFound, _subclasses, error_from_code


def test_every_error_has_its_own_code_and_valid_statuses() -> None:
    classes = _subclasses(ExoError)
    assert len({cls.code for cls in classes}) == len(classes)
    for cls in classes:
        assert 400 <= cls.http_status < 600
        assert hasattr(grpc.StatusCode, cls.grpc_status)


def test_an_error_crosses_the_wire_as_itself() -> None:
    for cls in _subclasses(ExoError):
        back = error_from_code(cls.code, "why", "field")
        assert type(back) is cls
        assert (back.message, back.param) == ("why", "field")
    assert type(error_from_code("from_the_future", "why")) is ExoError
    assert isinstance(error_from_code("model_not_found", "x"), ModelNotFound)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    import exo.errors

    for cls in _subclasses(ExoError):
        line = next(
            line for line in (exo.errors.__doc__ or "").splitlines() if f" {cls.__name__} " in line
        )
        assert [cls.code, str(cls.http_status), cls.grpc_status] == line.split()[-3:]
